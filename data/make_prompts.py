"""Writes the prompts of this folder: questions about everyday topics, written for this project.

    python data/make_prompts.py

The topics of prompts.held_out.jsonl.gz are in no prompt of prompts.train.jsonl.gz. The same script gives the same
bytes.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

HELD_OUT_TOPICS = 44
HELD_OUT_PROMPTS = 96
FORMS = (
    ("What is {t}?", "What are {t}?"),
    ("Explain {t} in simple terms.", "Explain {t} in simple terms."),
    ("Why is {t} important?", "Why are {t} important?"),
    ("Write a short paragraph about {t}.", "Write a short paragraph about {t}."),
    ("Give me three facts about {t}.", "Give me three facts about {t}."),
    ("How would you describe {t} to a child?", "How would you describe {t} to a child?"),
)
"""Each for a topic in the singular and in the plural."""

TOPICS = {
    "science": (
        "photosynthesis; gravity; the water cycle; evaporation; magnetism; static electricity; the speed of "
        "light; sound waves; friction; inertia; density; buoyancy; osmosis; diffusion; the periodic table; "
        "chemical bonds; acids and bases; rust; combustion; atoms; molecules; isotopes; radioactivity; "
        "nuclear fusion; nuclear fission; evolution; natural selection; DNA; genes; cells; bacteria; viruses; "
        "enzymes; proteins; the carbon cycle; the nitrogen cycle; plate tectonics; earthquakes; volcanoes; "
        "erosion; fossils; minerals; the rock cycle; glaciers; the greenhouse effect; the ozone layer; "
        "clouds; lightning; rainbows; hurricanes; tornadoes; tides; ocean currents; black holes; stars; "
        "galaxies; comets; meteors; eclipses; the phases of the moon; the solar system; orbits; satellites; "
        "telescopes; microscopes; thermometers; lasers; prisms; lenses; electric circuits; batteries; "
        "semiconductors; superconductors; entropy; kinetic energy; potential energy; heat transfer; pressure; "
        "vacuum; plasma; crystals; polymers; catalysts; photons; electrons; neutrons"
    ),
    "nature": (
        "bees; butterflies; ants; spiders; whales; dolphins; sharks; octopuses; coral reefs; penguins; owls; "
        "eagles; hummingbirds; migration of birds; hibernation; camouflage; food chains; ecosystems; "
        "rainforests; deserts; wetlands; tundra; grasslands; mangroves; mushrooms; mosses; ferns; oak trees; "
        "bamboo; cactuses; orchids; pollination; seeds; roots; leaves; elephants; wolves; bears; bats; frogs; "
        "snakes; turtles; crocodiles; salmon; horses; dogs; cats; dinosaurs; endangered species; "
        "biodiversity; soil; compost; rivers; lakes; mountains; caves; islands; beaches; waterfalls; forests"
    ),
    "health": (
        "sleep; exercise; vitamins; vitamin C; calcium; iron in food; dietary fiber; sugar; cholesterol; "
        "blood pressure; the heart; the lungs; the brain; the liver; the kidneys; the stomach; bones; "
        "muscles; skin; teeth; eyes; ears; the immune system; vaccines; antibiotics; allergies; asthma; the "
        "common cold; fever; hydration; stress; meditation; yoga; stretching; walking; running; swimming; "
        "posture; first aid; hygiene; hand washing; mental health; memory; attention; dreams; digestion; "
        "metabolism; hormones; red blood cells; white blood cells"
    ),
    "computing": (
        "algorithms; binary numbers; computer memory; hard drives; the internet; web browsers; email; "
        "passwords; encryption; firewalls; databases; spreadsheets; programming languages; Python; variables "
        "in programming; loops in programming; functions in programming; recursion; sorting algorithms; data "
        "structures; linked lists; hash tables; compilers; operating systems; open source software; version "
        "control; cloud computing; machine learning; neural networks; chatbots; robotics; computer viruses; "
        "search engines; social media; video games; virtual reality; barcodes; GPS; bluetooth; wifi; touch "
        "screens; microprocessors; 3D printing; digital cameras; speech recognition; computer graphics; unit "
        "testing; debugging; user interfaces; APIs"
    ),
    "history": (
        "the Roman Empire; ancient Egypt; ancient Greece; the Silk Road; the Renaissance; the Industrial "
        "Revolution; the printing press; the French Revolution; the Middle Ages; knights; castles; the "
        "Vikings; the Great Wall of China; the pyramids; the Colosseum; the invention of the wheel; the "
        "invention of writing; the steam engine; the telegraph; the telephone; the light bulb; the "
        "automobile; the airplane; the space race; the moon landing; the Age of Exploration; the Black Death; "
        "the Ottoman Empire; the Mongol Empire; the Inca Empire; the Maya; the Aztecs; democracy in Athens; "
        "the Magna Carta; the Olympic Games; museums; archaeology; money; trade routes; the abacus"
    ),
    "society": (
        "democracy; constitutions; voting; laws; courts; taxes; budgets; inflation; supply and demand; banks; "
        "savings accounts; interest rates; credit cards; insurance; stock markets; entrepreneurship; "
        "marketing; teamwork; leadership; communication; negotiation; time management; goal setting; critical "
        "thinking; problem solving; creativity; education; libraries; schools; universities; volunteering; "
        "recycling; renewable energy; solar power; wind power; hydroelectric power; public transport; "
        "bicycles; trains; bridges; city planning; architecture; agriculture; irrigation; crop rotation; "
        "fishing; tourism; languages; translation; journalism"
    ),
    "arts": (
        "poetry; short stories; novels; fairy tales; myths; metaphors; similes; alliteration; rhyme; theater; "
        "film; photography; painting; watercolors; sculpture; pottery; drawing; perspective in drawing; color "
        "theory; calligraphy; origami; weaving; knitting; sewing; jazz; classical music; opera; the piano; "
        "the violin; the guitar; drums; the flute; singing; rhythm; melody; harmony; dance; ballet; chess; "
        "puzzles"
    ),
    "food": (
        "bread; cheese; yogurt; rice; pasta; potatoes; tomatoes; onions; garlic; apples; bananas; oranges; "
        "strawberries; chocolate; coffee; tea; honey; olive oil; salt; pepper; cinnamon; spices; herbs; soup; "
        "salad; pizza; baking; grilling; fermentation; freezing food; breakfast; lunch boxes; vegetables; "
        "beans; nuts; eggs; milk; butter; ice cream; pancakes"
    ),
    "math": (
        "fractions; decimals; percentages; prime numbers; even and odd numbers; negative numbers; square "
        "roots; exponents; pi; triangles; circles; rectangles; angles; area; volume; symmetry; probability; "
        "averages; the median; graphs; equations; algebra; geometry; trigonometry; calculus; sets; ratios; "
        "logarithms; the Pythagorean theorem; the Fibonacci sequence"
    ),
}


def is_plural(topic: str) -> bool:
    """The topic takes a verb in the plural."""
    noun = topic.split(" in ")[0].split(" and ")[-1]
    return noun.endswith("s") and not noun.endswith(("ss", "sis", "cs", "us")) and not topic.startswith("the ")


def prompts(rng: random.Random) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Rows to train on, and rows of topics that are held out, in random order."""
    topics = [(field, topic.strip()) for field, names in TOPICS.items() for topic in names.split(";")]
    rng.shuffle(topics)
    train, held_out = [], []
    for number, (field, topic) in enumerate(topics):
        for singular, plural in FORMS:
            text = (plural if is_plural(topic) else singular).format(t=topic)
            row = {"messages": [{"role": "user", "content": text}], "topic": topic, "field": field}
            (held_out if number < HELD_OUT_TOPICS else train).append(row)
    rng.shuffle(train)
    rng.shuffle(held_out)
    return train, held_out[:HELD_OUT_PROMPTS]


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """One row per line, compressed, without a time stamp."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> None:
    """Write both files beside this script."""
    folder = Path(__file__).parent
    train, held_out = prompts(random.Random(7))
    write(folder / "prompts.train.jsonl.gz", train)
    write(folder / "prompts.held_out.jsonl.gz", held_out)


if __name__ == "__main__":
    main()
