"""Builds the distribution, and tries it as those who install it will: see ``make package``."""
