"""The search for a plan whose analysis keeps a budget: what is proposed, analysed and, without success, advised."""
