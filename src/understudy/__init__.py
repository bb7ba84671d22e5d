"""A small, shareable, differentially private stand-in for a sensitive dataset."""
