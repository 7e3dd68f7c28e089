"""The files of a model: fetch, check, read. From outside it needs encoder.py and errors.py alone."""
