"""Where samples come from: the one sample stream of both cases.

In the order in which data flows: lengths.py (generated samples), rows.py, text.py, tokenizer.py and
encode.py (files of text), prepare.py (once, before any rank starts) and stream.py (what ranks read).
"""
