"""Which settings of a stress run are not finished: it was killed, or it still runs."""

from __future__ import annotations

from steadygaze.runs.stress_card import Card


def unfinished(card: Card) -> list[str]:
    """The settings that some pictures have not been through; of the parts of ImageNet-C and -P, whose sizes a run does not keep, those
    that none has been through."""
    settings, done = card.run["settings"], card.done
    sets = {one["name"]: one["pictures"] for one in settings.get("shifts", ())}
    sets |= {f"neighbours/{one['name']}": one["pictures"] for one in settings.get("neighbours", ())}
    lost = [name for name, still in card.unreadable.items() if still]
    found = []
    for setting in settings.get("conditions", ()):
        mine = next((name for name in sets if setting == name or setting.startswith(f"{name}/")), None)
        if mine is None:
            begins = tuple(f"{name.removeprefix('neighbours/')}:" for name in sets)
            wanted = (settings.get("pictures") or 0) - sum(not name.startswith(begins) for name in lost)
        else:
            shown = min(sets[mine], settings.get("limit") or sets[mine]) if mine == setting else 1
            wanted = shown - sum(name.startswith(f"{mine.removeprefix('neighbours/')}:") for name in lost)
        if done.get(setting, 0) < wanted:
            found.append(setting)
    return found
