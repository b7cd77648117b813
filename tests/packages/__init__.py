"""What distributions get, built, installed and removed as they would be. Run by ``make test-packages``."""
