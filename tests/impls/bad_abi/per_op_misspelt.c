/* Misspells a field of one operation's arithmetic. */
#define MISSPELT
#include "per_op_profile.c"
