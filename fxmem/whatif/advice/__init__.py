"""Changes to a step, each made on fakes and analysed."""
