"""How annotations are checked under pytest: by beartype, where an int may stand for a float, as for a type checker."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
