/* A shared object that is not Islet's. */
extern const int fake_empty;
const int fake_empty = 1;
