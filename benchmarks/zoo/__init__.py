"""Every architecture of the model collections, analysed."""
