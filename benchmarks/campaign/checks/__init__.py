"""The checks of the campaign, one file for each group."""
