"""Operations for the property test of rules, by family as in `tfdist/spmd/rules`."""
