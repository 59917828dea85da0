"""Measurements: each writes its figures with the conditions they were taken under."""
