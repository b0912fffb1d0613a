"""One module for each format; its first line says what the file is, as `fxmem export --help` prints it."""
