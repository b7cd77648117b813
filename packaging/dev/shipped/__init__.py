"""Makes what is shipped and can be made from the program itself: completions of shells and manual pages."""
