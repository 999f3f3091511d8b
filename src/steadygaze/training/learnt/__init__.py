"""What the trainings of learnt explanation methods share: images, the resumable run, one output file.

| module | content                                                                                  |
| ------ | ---------------------------------------------------------------------------------------- |
| images | preprocessed images, in an order that depends on the seed alone                          |
| run    | a request, and a run that is resumed exactly where it stopped, with one writer at a time |
| adam   | the state of an Adam optimiser as tensors of a file                                       |
"""
