"""Titles in many scripts, and the forms in which one text can be written."""

import unicodedata

FORMS = ("NFC", "NFD", "NFKC", "NFKD")
TITLES = {
    "ascii": ["copper kettle", "garden hose"],
    "latin": ["crème brûlée dish", "Ångström façade lamp", "Straße über Öl"],
    "greek": ["ελληνικός καφές", "ξύλινο τραπέζι"],
    "cyrillic": ["синий чайник", "ёлочные игрушки"],
    "arabic": ["كتاب الطبخ العربي", "قهوة عربية"],
    "hebrew": ["סֵפֶר בישול", "שולחן עץ"],
    "devanagari": ["हिन्दी किताबें", "मिट्टी के बर्तन"],
    "tamil": ["தமிழ் புத்தகம்", "மண் பானை"],
    "thai": ["หม้อหุงข้าวไฟฟ้า", "น้ำปลาร้า"],
    "khmer": ["សៀវភៅខ្មែរ", "ទឹកត្រី"],
    "chinese": ["红色平底锅", "不锈钢水壶", "书"],
    "japanese": ["日本語の本", "コーヒーメーカー", "ｶﾒﾗケース"],
    "korean": ["한국어 책", "유리 물병"],
    "emoji": ["☕️ coffee cup ❤️", "👩‍🍳 cook book"],
}


def in_form(text: str, form: str) -> str:
    """Returns a text in one of the forms; NFKC and NFKD also change width and ligatures."""
    return unicodedata.normalize(form, text)
