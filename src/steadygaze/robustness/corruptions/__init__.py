"""The corruptions of ImageNet-C, Tiny-ImageNet-C and CIFAR-10-C."""
