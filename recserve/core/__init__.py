"""Types that item requests and text requests share: queries, sequences, strategies and plug-ins."""
