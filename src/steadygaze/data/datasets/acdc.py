"""The conditions of ACDC, driving scenes in bad weather; `data/label_maps.py` reads its files."""

ACDC = "ACDC"
ACDC_CONDITIONS = ("fog", "night", "rain", "snow")


def acdc_condition(name: str) -> str:
    """The condition of an image of ACDC by its name, such as "fog"."""
    return name.split("/")[1]
