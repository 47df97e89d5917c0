"""Frozen, keyword-only records with a JSON round trip; standard library only.

Every other room speaks in these. Units are in the names, SI inside; a share is 0..1; ``None`` means
"not known", never zero.
"""
