"""The model as actor: token ids in, finished completions out, with the version of the weights."""
