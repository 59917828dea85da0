"""Who owns which bytes, until when."""
