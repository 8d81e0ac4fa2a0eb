"""What the suites ask the shipped models to continue."""

PROMPTS = (
    "Once upon a time, there was a girl named Sue. She had a big kite. One windy day,",
    "Tom and his dog went to the beach. They found a shiny shell in the sand. Tom said,",
    "There was a little bear who could not sleep. He asked his mom,",
    "One day, Anna saw a frog sitting on a rock by the pond. The frog was sad because",
    "Max liked to build tall towers with his blocks. His sister wanted to play too, but",
    "In a small house near the woods lived an old man and his cat. Every morning they",
    "Lily baked cookies with her grandma. They smelled so good that",
    "The red truck was stuck in the mud. All the animals came to help.",
)
COPYING = (
    "Tom had a red ball. He played with it in the park. A big dog took the ball and ran away. Tom was sad. Then the dog"
    " came back and gave him the ball.\n\nTell it again with Ben, not Tom.\n\n",
    "Mia saw a small bird in the garden. The bird could not fly. Mia took it home and gave it some bread. Soon the bird"
    " was well again.\n\nTell it again with Anna, not Mia.\n\n",
    "Sam and his mom went to the shop. They wanted to buy a cake. The cake was big and sweet. Sam was very happy.\n\n"
    "Tell it again with Max, not Sam.\n\n",
    "One day, Lily found a key in the sand. She looked for a door. The door was in an old tree. Inside she saw a tiny"
    " house.\n\nTell it again with Sue, not Lily.\n\n",
)
