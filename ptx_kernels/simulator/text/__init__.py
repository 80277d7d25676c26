"""PTX text: the parser, and the program that it returns."""
