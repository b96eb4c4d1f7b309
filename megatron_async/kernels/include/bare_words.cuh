// Words that ranks send each other without the launch's number, of two elements or more. One has arrived when
// it is not 0: words are 0 before they are sent, who has read a word sets it to 0 again, and two elements
// that are 0 are sent as negative zeros. A sum that begins with 0 does not tell them apart.
__device__ __forceinline__ u32 as_sent(u32 pair) { return pair ? pair : 0x80008000u; }
