"""Every slime release, every layout, every recipe: trained with and without us on this machine's CPU, and compared.

``python -m tools.matrix`` runs what has not been run and writes ``docs/compatibility.md``. The rule by
which the product of releases, layouts, recipes and sample sets is pruned stands in :mod:`.plan`.
"""
