"""The corruptions of ImageNet-C and CIFAR-10-C."""
