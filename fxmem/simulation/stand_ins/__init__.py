"""What a program finds in the place of card, driver, processes and files."""
