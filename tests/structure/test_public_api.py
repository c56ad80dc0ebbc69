"""The names that `import ghostexport` offers: adding or removing one is a decision, made here."""

import ghostexport

PUBLIC = [
    "BlockSpan",
    "Boundary",
    "Execution",
    "GhostExportError",
    "Operator",
    "OperatorSet",
    "PrunePlan",
    "Recipe",
    "RunFolder",
    "drop_blocks",
    "export_model",
    "insert_operators",
    "inspect_graph",
    "load_engine",
    "load_model",
    "load_operators",
    "operate",
    "parse_recipe",
    "run",
    "swap_operator",
    "verify",
]


def test_public_names_exist_and_are_documented():
    assert dir(ghostexport) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(ghostexport, name).__doc__, name
