"""The report about one run or several: an HTML page and its Markdown summary, made without torch or Lightning."""
