"""The report about one run or several: an HTML page, written without torch or Lightning."""
