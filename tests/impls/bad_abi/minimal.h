/* What the libraries of this folder share: an honest description, so that each file shows one thing only. */
#ifndef MINIMAL_H_
#define MINIMAL_H_

#include <stddef.h>

#include "paritree.h"

static void describe_as(paritree_description *description, const char *capabilities, const char *ops, const char *taps) {
  description->name = "minimal";
  description->version = "3";
  description->profile_name = NULL;
  description->profile.items = NULL;
  description->profile.count = 0;
  description->capabilities = capabilities;
  description->ops = ops;
  description->taps = taps;
}

#endif
