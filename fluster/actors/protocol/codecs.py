"""How the calls of an actor are written."""

PICKLE, JSON = "pickle", "json"
CODECS = (PICKLE, JSON)
