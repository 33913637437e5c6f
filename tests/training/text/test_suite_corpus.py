"""The corpus on which the suite trains BERT, on the Debian packages it is made of."""

import subprocess

import pytest

from sums import sha256
from torch_thor.training.text.prepare import prepare

FOLDERS = ["anarchism/html", "python3.11/html"]
VERSIONS = {
    "anarchism": "15.3-3",
    "python3.11-doc": "3.11.2-6+deb12u8",
    "perl-doc": "5.36.0-7+deb12u3",
}
SUMS = {
    "train.arrow": "a5272b0f10520264a06dcd3e941499dffc65af16340cbcafeb9dfa4bf2ad6e38",
    "held-out.arrow": "3bfcc8de1aa0687f5496de6315bc2f7ec42d524ab20121ba059b8c474b9dbafa",
    "tokenizer.json": "369417a00e525d6963f5d420ef8c4eb60ad5caa8fa8858db5c5750bd599ad35a",
}


def installed(package):
    """The installed version of a package of Debian, or nothing."""
    command = ["dpkg-query", "--show", "--showformat=${Version}", package]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout
    except FileNotFoundError:
        return ""


@pytest.mark.slow
def test_the_corpus_of_the_suite_has_the_bytes_that_it_was_measured_with(tmp_path):
    if {package: installed(package) for package in VERSIONS} != VERSIONS:
        pytest.skip(f"needs Debian's packages {VERSIONS}")
    places = [*(f"/usr/share/doc/{folder}" for folder in FOLDERS), "/usr/share/perl/5.36.0/pod"]
    prepare(places, tmp_path / "corpus", vocab_size=2048, lengths=[32], workers=2)
    assert {name: sha256(tmp_path / "corpus" / name) for name in SUMS} == SUMS
