"""What a card can give: driver, desktop, foreign memory and our own reservations, line by line."""
