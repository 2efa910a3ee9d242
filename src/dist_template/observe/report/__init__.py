"""What a run was, for people: one self-contained HTML page and its Markdown summary, from history/ and diagnosis/.

Of one run or of several over each other; without torch or Lightning, so that it is there within a second or two.
"""
