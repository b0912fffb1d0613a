"""A program of the user's own, untouched, on a card that is pretended: any code as a step, its rounds found."""
