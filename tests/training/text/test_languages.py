"""Any language: what is encoded can be decoded, and is what an exported tokenizer encodes."""

import unicodedata

import pyarrow as pa
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertConfig

from torch_thor.training.text.prepare import prepare
from torch_thor.training.text.wordpiece import UNKNOWN, load_tokenizer, new_tokenizer

TEXTS = {
    "ja": "東京は日本の首都です。がぎぐげごの音はとても大切だと先生が言いました。",
    "zh": "北京是中国的首都。他每天早上都去公园散步，然后回家吃早饭。",
    "th": "ประเทศไทยมีกรุงเทพมหานครเป็นเมืองหลวงที่ใหญ่ที่สุดและมีประชากรมากที่สุดของประเทศ" * 2,
    "hi": "दिल्ली भारत की राजधानी है। हिन्दी यहाँ की एक बड़ी भाषा है।",
    "ta": "சென்னை தமிழ்நாட்டின் தலைநகரம் ஆகும். இங்கு மக்கள் தமிழ் பேசுகிறார்கள்.",
    "ar": "القاهرة هي عاصمة جمهورية مصر العربية. يتكلم الناس فيها اللُّغَةَ العربية.",
    "ko": "서울은 대한민국의 수도이다. 사람들은 그곳에서 한국어를 말한다.",
}
TEXTS["mixed"] = "\n\n".join([*TEXTS.values(), "London is the capital of England, and is large."])


def letters(text):
    """The text without spaces, which tokenizers for BERT do not keep."""
    return "".join(unicodedata.normalize("NFC", text).lower().split())


@pytest.mark.parametrize("language", TEXTS)
def test_what_is_encoded_is_decoded_and_exported(tmp_path, language):
    text = TEXTS[language]
    (tmp_path / "texts").mkdir()
    for n in range(4):
        (tmp_path / "texts" / f"{n}.txt").write_text(text)
    code = "en" if language == "mixed" else language
    out = tmp_path / "corpus"
    manifest = prepare([f"{tmp_path}/texts"], out, vocab_size=1000, lengths=[32], language=code)
    assert manifest["other scripts"]
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    with pa.memory_map(str(out / "train.arrow")) as source:
        rows = pa.ipc.open_file(source).read_all().to_pylist()
    assert len(rows) == 3
    tokens = rows[0]["tokens"]
    assert letters(tokenizer.decode(tokens)) == letters(text)
    assert tokenizer.token_to_id(UNKNOWN) not in tokens
    assert len(rows[0]["ends"]) > 1 or language == "th"  # which has no full stops

    from transformers import PreTrainedTokenizerFast

    exported = PreTrainedTokenizerFast(tokenizer_object=load_tokenizer(out / "tokenizer.json"))
    exported.save_pretrained(tmp_path / "export")
    BertConfig().save_pretrained(tmp_path / "export")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert loaded(text, add_special_tokens=False)["input_ids"] == tokens


def test_lines_end_sentences_where_there_are_neither_spaces_nor_full_stops(tmp_path):
    lines = ["กรุงเทพมหานครเป็นเมืองหลวงของประเทศ", "เชียงใหม่เป็นเมืองทางภาคเหนือของประเทศ"]
    for n in range(2):
        (tmp_path / f"{n}.txt").write_text("\n".join(lines))
    manifest = prepare([str(tmp_path)], tmp_path / "corpus", vocab_size=300, lengths=[32])
    assert manifest["totals"]["train.arrow"]["sentences"] == 2


def test_accents_are_stripped_in_latin_greek_and_cyrillic_only(tmp_path):
    any_script, of_bert = new_tokenizer(True, any_script=True), new_tokenizer(True)
    text = "Café Ǘ Ἀθήνᾳ ЙОЖ ÅNGSTRÖM"
    assert any_script.normalizer.normalize_str(text) == "cafe u αθηνα иож angstrom"
    assert of_bert.normalizer.normalize_str(text) == "cafe u αθηνα иож angstrom"
    for text in ("がぎ", "हिन्दी", "ที่", "اللُّغَةَ", "நாய்", "한국어"):
        assert any_script.normalizer.normalize_str(text) == text
        assert of_bert.normalizer.normalize_str(text) != text or text == "நாய்"
    cased = new_tokenizer(False, any_script=True).normalizer
    assert cased.normalize_str("Café がぎ") == "Café がぎ"
