"""``paceline bench``: the same work up a ladder of rungs, one change a rung, each in fresh processes.

``rungs.py`` has the ladders as data, ``contenders/`` a script a peer, which never imports paceline. ``work.py`` writes
what all of them start from. ``ladder.py`` runs the cells and keeps their records; ``standings.py`` says what they come
to.
"""
