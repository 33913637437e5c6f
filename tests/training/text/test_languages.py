"""Any language: encoded text can be decoded, and an exported tokenizer encodes it alike."""

import unicodedata

import pyarrow as pa
import pytest
from transformers import AutoTokenizer, BertConfig, PreTrainedTokenizerFast

from torch_thor.training.text.prepare import prepare
from torch_thor.training.text.wordpiece import UNKNOWN, load_tokenizer, normalizer

TEXTS = {
    "ja": "東京は日本の首都です。がぎぐげごの音はとても大切だと先生が言いました。",
    "th": "ประเทศไทยมีกรุงเทพมหานครเป็นเมืองหลวงที่ใหญ่ที่สุดและมีประชากรมากที่สุดของประเทศ" * 2,
    "hi": "दिल्ली भारत की राजधानी है। हिन्दी यहाँ की एक बड़ी भाषा है।",
    "ar": "القاهرة هي عاصمة جمهورية مصر العربية. يتكلم الناس فيها اللُّغَةَ العربية.",
    "vi": "Việt Nam là một quốc gia ở Đông Nam Á. Thủ đô của nước này là Hà Nội.",
}
TEXTS["mixed"] = "\n\n".join([*TEXTS.values(), "London is the capital of England, and is large."])


def write(folder, texts):
    folder.mkdir()
    for n, text in enumerate(texts):
        (folder / f"{n}.txt").write_text(text)
    return str(folder)


def letters(text):
    """The text without spaces, which tokenizers for BERT do not keep."""
    return "".join(unicodedata.normalize("NFC", text).split())


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("language", TEXTS)
def test_encoded_text_is_decoded_and_exported(tmp_path, language, form):
    """Cased, so that accents stay; in decomposed Unicode (NFD, as of macOS) too."""
    text = unicodedata.normalize(form, TEXTS[language])
    texts = write(tmp_path / "texts", [text, f"{text}\n\n{text}"])
    code, out = "en" if language == "mixed" else language, tmp_path / "corpus"
    prepare([texts], out, vocab_size=1000, lengths=[32], language=code, lowercase=False)
    with pa.memory_map(str(out / "train.arrow")) as source:
        [tokens] = pa.ipc.open_file(source).read_all()["tokens"].to_pylist()
    tokenizer = load_tokenizer(out / "tokenizer.json")
    assert letters(tokenizer.decode(tokens)) in (letters(text), letters(text) * 2)
    assert tokenizer.token_to_id(UNKNOWN) not in tokens

    exported = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    exported.save_pretrained(tmp_path / "export")
    BertConfig().save_pretrained(tmp_path / "export")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "export")
    found = loaded(text, add_special_tokens=False)["input_ids"]
    assert tokens in (found, found * 2)


def test_lines_end_sentences_where_there_are_neither_spaces_nor_full_stops(tmp_path):
    lines = ["กรุงเทพมหานครเป็นเมืองหลวงของประเทศ", "เชียงใหม่เป็นเมืองทางภาคเหนือของประเทศ"]
    texts = write(tmp_path / "texts", ["\n".join(lines), "\n".join(lines[::-1])])
    manifest = prepare([texts], tmp_path / "corpus", vocab_size=300, lengths=[32])
    assert manifest["totals"]["train.arrow"]["sentences"] == 2


def test_accents_are_stripped_in_latin_greek_and_cyrillic_only():
    lower, cased = normalizer(True), normalizer(False)
    assert lower.normalize_str("Café Ǘ Ἀθήνᾳ ЙОЖ ÅNGSTRÖM") == "cafe u αθηνα иож angstrom"
    for text in ("がぎ", "हिन्दी", "ที่", "اللُّغَةَ", "நாய்", "한국어"):
        assert lower.normalize_str(text) == text
    assert cased.normalize_str(unicodedata.normalize("NFD", "Café がぎ")) == "Café がぎ"
