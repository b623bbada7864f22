"""Kinds of attention, one file each: the rule, the class of group, the name on the wire. ``spec.ATTENTION`` lists them."""
