-- stg_problems: the good rows, with the identity of their question and what duplicates are found by.
-- Grain: one row per good source row; a problem_id may occur more than once.
--   problem_id  varchar  first 16 hexadecimal digits of the SHA-256 of the normalised question
--   folded      varchar  the question without case, quotation marks, punctuation that ends words, and differences of Unicode (stages/near_duplicates.py)
--   signs       varchar  what of it is no letter: numbers and signs in order
--   masked      varchar  the folded question with # for every number
--   others      as in stg_rows
with folded as (
    select
        substr(sha256(normalised), 1, 16) as problem_id,
        * exclude (reason, row_text),
        fold(normalised) as folded
    from stg_rows
    where reason is null
),

final as (
    select
        *,
        trim(regexp_replace(folded, '[\s\p{L}\p{M}]+', ' ', 'g')) as signs,
        regexp_replace(folded, '\p{Nd}+([.,]\p{Nd}+)*', '#', 'g') as masked
    from folded
)

select * from final
