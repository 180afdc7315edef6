/* Declares the arithmetic of an operation that does not exist. */
#define NOWHERE
#include "per_op_profile.c"
