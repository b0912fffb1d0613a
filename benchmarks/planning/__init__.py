"""How good checkpoint plans and other advice are, beside other tools and proven bounds."""
