"""The text on which the accuracy of configurations is measured, written for this suite, and words to draw."""
from __future__ import annotations

import re

_PROSE = (
    """A river does not choose its bed once and for all. Where the ground is soft and nearly flat, the water on the
outside of a bend runs faster than the water on the inside, and it cuts into the bank that it meets. The sand
that it takes away is laid down again a little further along, on the inside of the next bend, where the stream
is slow. Year by year the bend grows wider, until only a narrow neck of land is left between its two ends. One
spring, when the snow melts quickly and the water is high, the river breaks through the neck and takes the short
way. The old loop is cut off and becomes a lake in the shape of a horseshoe. Reeds grow at its edges, then
willows, and after some hundred years nothing but a line of wet meadows shows where boats once went. People who
draw maps have to begin again, and villages that were built for the sake of a harbour find themselves an hour's
walk from the water.""",
    """To bake a plain loaf you need flour, water, salt, and a little yeast. Mix three cups of flour with one spoon of
salt. Stir the yeast into a cup of warm water and wait until it begins to foam; if it does not, it is dead, and
you should take a new packet. Pour the water into the flour and work the dough with your hands for ten minutes.
It will be sticky at first, and then smooth. Cover the bowl with a cloth and put it in a warm place. After an
hour the dough should have doubled in size. Press it flat, fold it twice, and shape it into a ball. Let it rest
for another half an hour while the oven gets hot. Cut a cross into the top with a sharp knife, so that the steam
can get out, and bake the loaf for about forty minutes. It is done when it sounds hollow if you knock on its
bottom. The hardest part is to wait until it has cooled before you cut the first slice.""",
    """The first clocks with a pendulum were built in the seventeenth century, and they changed what people meant by
being on time. Before them a good clock lost a quarter of an hour in a day, and it had only one hand. The idea
behind the pendulum is simple: the time of one swing depends on the length of the rod and hardly at all on how
wide the swing is. As the weight gets slower, it also has a shorter way to go. A clock that is driven by such a
swing loses only a few seconds in a day, so that a second hand makes sense. Two things disturb it. A metal rod
gets longer when it is warm, and then the clock goes slow in the summer. And on a ship the whole room swings, so
that no pendulum could ever tell a sailor how far to the east or to the west he was. For that a watch with a
spring was needed, and it took another hundred years.""",
    """"You are late," said the old woman without looking up from her knitting. "The train was late," said the boy.
"The train has been late every day this week, and every day you have told me so as if it were news." He put his
bag down next to the stove and held out his hands to warm them. Outside it had begun to snow again. "Did you
bring the letter?" she asked. He had brought it. It had come in the morning, in a grey envelope with a foreign
stamp, and he had carried it all day in the inside pocket of his coat without opening it, because it was not
addressed to him. She put her knitting aside, took the letter, and turned it over twice. Then she laid it on the
table between them. "Read it to me," she said. "My eyes are not good enough for his handwriting. They never
were, not even when we were young." The boy opened the envelope, and a photograph fell out.""",
)
_CODE = '''\
def mean(values):
    """Return the average of a list of numbers."""
    if not values:
        raise ValueError("there is nothing to average")
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    """Return how far the numbers are from their average, squared, on average."""
    center = mean(values)
    return mean([(value - center) ** 2 for value in values])


if __name__ == "__main__":
    heights = [1.62, 1.75, 1.81, 1.58, 1.69]
    print("mean:", mean(heights))
    print("variance:", variance(heights))
'''
PASSAGES = (*(" ".join(text.split()) for text in _PROSE), _CODE)
WORDS = tuple(sorted({word for text in PASSAGES[:3] for word in re.findall(r"[a-z]{2,}", text.lower())}))
