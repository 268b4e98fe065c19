"""The API keys of a cluster in chaos: one that stays valid, and one that is revoked again and again."""

import os
import pathlib

from api_keys import line

KEPT, REVOKED = "kept", "revoked"


class Keys:
    """The file of keys."""

    def __init__(self, directory, name):
        self.file = pathlib.Path(directory) / f"keys-{name}"
        self.restore()

    def revoke(self, carelessly):
        """Takes one key out of the file. If `carelessly`, another line of the new file is a mistake."""
        self._replace(("this is no key\n" if carelessly else "") + line("kept", KEPT))

    def restore(self):
        self._replace(line("kept", KEPT) + line("revoked", REVOKED))

    def _replace(self, text):
        new = self.file.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.file)
