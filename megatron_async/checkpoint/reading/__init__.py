"""Files of a model directory, read so that a broken or hostile one is one line."""
