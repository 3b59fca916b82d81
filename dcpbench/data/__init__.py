"""Where samples come from: length distributions, text files, tokenising, and the one sample stream of both cases."""
