// No locales.
#ifndef TB_HEXAGON_LOCALE_H
#define TB_HEXAGON_LOCALE_H

#endif
