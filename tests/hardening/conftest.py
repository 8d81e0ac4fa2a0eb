"""The hypothesis profile "hardening": `@settings(settings.get_profile("hardening"))` tries 50 examples, with --all
5,000.
"""

from hypothesis import settings


def pytest_configure(config):
    examples = 5_000 if config.getoption("--all") else 50
    settings.register_profile("hardening", settings.get_profile("fixed"), max_examples=examples)
