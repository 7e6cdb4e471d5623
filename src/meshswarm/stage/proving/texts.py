"""The prompts that wire dtypes are proved on: prose, code, data, dialogue, several scripts, about 100 tokens each.

The rule this file keeps: it stays as it is. A figure in one proof is only comparable with another's on the same texts.
"""

PROOF_TEXTS = (
    "The lighthouse keeper had counted ships for thirty years, and in all that time he had never seen one turn around. "
    "That evening, shortly after the lamp was lit, a small grey freighter slowed down, hesitated as if somebody on the "
    "bridge had remembered an unlocked door, and began to turn. He reached for his notebook, found that the pencil was "
    "gone, and realised that for the first time he would have to remember something by himself.",
    "def merge(left: list[int], right: list[int]) -> list[int]:\n"
    '    """Merge two sorted lists into one."""\n'
    "    merged = []\n"
    "    i = j = 0\n"
    "    while i < len(left) and j < len(right):\n"
    "        if left[i] <= right[j]:\n"
    "            merged.append(left[i])\n"
    "            i += 1\n"
    "        else:\n"
    "            merged.append(right[j])\n"
    "            j += 1\n"
    "    return merged + left[i:] +",
    '{"order": 48213, "customer": {"name": "M. Okafor", "city": "Leiden"}, "items": [{"sku": "A-17", "count": 3, '
    '"price": 12.50}, {"sku": "C-02", "count": 1, "price": 199.00}], "paid": true, "total": 236.50, "history": '
    '[{"at": "2024-03-01T09:15:00Z", "status": "received"}, {"at": "2024-03-02T14:40:00Z", "status": "packed"}, '
    '{"at": "2024-03-03T07:05:00Z", "status": ',
    "Question: A train leaves at 14:20 and travels 210 km at 84 km/h. It waits 25 minutes and then travels another 63 "
    "km at 42 km/h. When does it arrive?\nAnswer: The first part takes 210 / 84 = 2.5 hours, so it ends at 16:50. "
    "After the wait it is 17:15. The second part takes 63 / 42 = 1.5 hours. 17:15 plus one hour and thirty minutes is",
    "Der Zug nach Freiburg fährt heute von Gleis sieben, nicht von Gleis vier. Wer es eilig hat, nimmt die Treppe am "
    "südlichen Ende; der Aufzug ist seit Dienstag kaputt. Les voyageurs pour Strasbourg changent à Offenbourg, et "
    "le dernier train part à vingt-deux heures dix. Quien llegue tarde tendrá que esperar hasta la mañana siguiente.",
    "今天的会议改到下午三点，请大家提前准备好资料。 "
    "Погода завтра будет ясной, ветер слабый. "
    "القطار يغادر في الساعة الثامنة. "
    "明日は雨が降るそうです。 🚂✨ ok!",
    "User: My bread does not rise. What am I doing wrong?\n"
    "Assistant: Most often it is the yeast or the temperature. How old is the yeast, and how warm was the water?\n"
    "User: The packet is from last year. The water was hot, I think.\n"
    "Assistant: Then both may be to blame: yeast loses its strength after some months, and water above 45 degrees "
    "kills it. Try a fresh packet with water that feels barely warm, and give the dough",
    "1. Open the valve slowly.\n2. Wait until the pressure is between 2.0 and 2.4 bar.\n3. Close the valve and write "
    "down time, pressure and temperature.\n4. Repeat steps 1 to 3 every ten minutes.\n\n| time  | bar  | deg C |\n"
    "|-------|------|-------|\n| 08:00 | 2.11 | 41.0  |\n| 08:10 | 2.16 | 41.5  |\n| 08:20 | 2.22 | 42.0  |\n| 08:30 |",
)
