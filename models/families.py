"""All model families, found by their config's type."""

from models import bert, electra, transformer_xl, xlnet
from models.parameters import Family

FAMILIES: dict[str, Family] = {
    "bert": bert.FAMILY,
    "electra": electra.FAMILY,
    "transformer-xl": transformer_xl.FAMILY,
    "xlnet": xlnet.FAMILY,
}


def family_of(config) -> Family:
    """The family whose config this is."""
    return next(family for family in FAMILIES.values() if family.config is type(config))
