"""Private logistic regression on three devices."""
